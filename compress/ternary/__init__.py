"""BitNet: linear layers whose weights are −1, 0 and 1 (or −1 and 1), trained as such, and quantisation-aware training."""
