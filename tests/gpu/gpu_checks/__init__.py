"""What only a GPU can show, as plain functions: they need neither pytest nor a package index."""
