"""Each message of the library with an example: the mistake, and the line that it tells to write."""
