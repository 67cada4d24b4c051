"""What a model folder, file or hub id holds, read without torch: config.json, tensor headers, sizes."""
