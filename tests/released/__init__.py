"""Records of released training code, and replays of them through this project."""
