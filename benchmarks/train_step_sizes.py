"""What train_step.py trains: drafters for SmolLM2-135M, whose sizes these are, and how."""

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, MLP, VOCABULARY = 576, 9, 3, 64, 1536, 49152
EPS, THETA = 1e-5, 10000.0
ROWS = 8  # of the one batch
RATE, MAX_GRAD_NORM = 6e-4, 1.0
