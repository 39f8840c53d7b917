"""What a server keeps of the bodies that it has delivered, and who is left waiting."""
