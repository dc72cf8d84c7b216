"""Effects integrated out beside networks: in closed form, by groups, by importance sampling."""
