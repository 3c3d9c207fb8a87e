"""Text as token streams: embedded, from files, from prepared shards; batches cut from them."""
