"""Released libraries that compute the same, and how each is driven; one file for each."""
