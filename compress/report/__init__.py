"""The report: size, quality and speed of one artifact, and the pages that show them."""
