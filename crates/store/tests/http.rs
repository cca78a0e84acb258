//! Objects of HTTP and S3 servers: a scripted server that does not behave, nginx, and moto.
#![cfg(feature = "http")]

#[path = "http/cached.rs"]
mod cached;
#[path = "http/daemon.rs"]
mod daemon;
#[path = "http/hostile.rs"]
mod hostile;
#[path = "http/killed.rs"]
mod killed;
#[path = "http/nginx.rs"]
mod nginx;
#[path = "http/reader.rs"]
mod reader;
#[path = "http/s3.rs"]
mod s3;
#[path = "http/server.rs"]
mod server;
