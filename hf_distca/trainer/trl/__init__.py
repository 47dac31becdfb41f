"""TRL's trainers with planned core attention."""
