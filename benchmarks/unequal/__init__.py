"""What planned shares gain on unequal devices, and what cutting a batch costs."""
