"""What chapters and pages show: widgets, exercises, figures, measurements, scenes."""
