"""What training logs say about who failed: lines recognised one by one, then judged together."""
