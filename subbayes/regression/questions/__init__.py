"""What is asked of a fitted regression: summaries, contrasts, margins, hypotheses."""
