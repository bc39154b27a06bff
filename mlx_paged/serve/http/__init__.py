"""HTTP/1.1 beneath the handler: who is listened to, bodies, streams of events, whether the client is there."""
