"""How the forward pass runs. `base` is the contract, `selection` the choice, and each backend has a file of its own."""
