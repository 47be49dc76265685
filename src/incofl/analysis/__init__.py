"""Looking at runs: what their folders tell, in numbers and pictures."""
