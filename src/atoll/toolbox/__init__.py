"""What methods are made of: work of clients, work of servers, objectives."""
