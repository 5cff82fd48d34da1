"""The GPUs of this rank: what the driver, torch and NCCL tell of them, away from the training thread."""
