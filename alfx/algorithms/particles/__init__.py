"""What the algorithms of particles, generators and hypernetworks share; see the modules."""
