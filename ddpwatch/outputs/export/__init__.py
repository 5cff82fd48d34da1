"""A recorded run in formats that other programs read. Each goes through the recording once, in bounded memory."""
