"""What tests/promises holds the library to: plain Keras on one device, and models to try it on."""
