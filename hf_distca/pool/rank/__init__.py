"""The ranks' end: which servers take part, what they are asked, how fast they are."""
