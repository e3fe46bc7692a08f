"""What a user is told about a mistake."""
