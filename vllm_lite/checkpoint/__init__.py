"""Contents of a model folder, file or hub id, read without torch: config.json, tensor headers, sizes."""
