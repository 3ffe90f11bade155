"""BitNet: linear layers with weights −1, 0 and 1 (or −1 and 1), trained as such; and quantisation-aware training."""
