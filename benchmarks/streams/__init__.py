"""What the client benchmark is made of: a loopback server, the clients, and the process that times one of them."""
