"""What calibration text tells of a block: its inputs, and statistics of every layer's."""
