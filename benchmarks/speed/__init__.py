"""How long a training step takes: loops written by hand, Keras ``fit`` and this library."""
