"""What a cache decides about its blocks: which precision a block has at which age."""
