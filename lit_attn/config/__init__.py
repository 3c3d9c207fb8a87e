"""What a user writes: experiments, studies, and the errors that name a file, a key and a remedy."""
