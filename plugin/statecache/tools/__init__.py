"""What looks at an installation or a running server: doctor and fit."""
