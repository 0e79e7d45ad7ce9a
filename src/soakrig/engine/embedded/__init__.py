"""A small, honest mixture-of-experts serving engine in torch that runs on any machine, without a GPU or downloads."""
