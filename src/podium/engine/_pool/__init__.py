"""What a pool is made of: its members, who sends to them, who watches them, who starts and ends them."""
