"""The frozen teacher: its forward pass, and the way of its hidden states to the student ranks that need them."""
