"""What hf-distca doctor looks at."""
