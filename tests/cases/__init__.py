"""The table of cases: trainings that N replicas and one device must end alike."""
