"""What training begins with: a small transformer that knows single steps, and thinks badly or not at all."""
