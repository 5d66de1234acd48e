"""What the adapters of all engines share: settings, metrics, seams."""
