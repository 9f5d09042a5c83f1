"""Add-ons to the five rooms of the library; none imports another."""
