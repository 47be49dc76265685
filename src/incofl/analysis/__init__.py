"""What can be seen in finished or running runs: everything here reads run folders only."""
