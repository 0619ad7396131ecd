"""What a checkpoint is and how it is cut over ranks: configuration, headers, slices. No torch, no tensor data."""
