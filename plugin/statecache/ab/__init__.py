"""A/B tests: does a setting help on a workload, by how much, and can one tell?"""
