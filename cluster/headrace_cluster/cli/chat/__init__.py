"""`headrace chat`: a conversation on the terminal, or one answer; session.py chooses between the two."""
