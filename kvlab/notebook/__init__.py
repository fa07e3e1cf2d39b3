"""What chapters and pages show, and the exercises that a reader answers."""
