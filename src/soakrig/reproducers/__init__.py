"""Named load shapes, one file each, with the signature that each is known to provoke."""
