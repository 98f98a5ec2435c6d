"""What moves gradients between ranks where no wrapper of torch does."""
