"""What stands on the five rooms of the library; no add-on imports another."""
