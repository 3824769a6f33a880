"""The paper: its text, the table behind its numbers, and what builds and checks both."""
