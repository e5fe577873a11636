"""What is computed: problems, the float64 oracle, the plain yardstick, the metrics and the named cases."""
