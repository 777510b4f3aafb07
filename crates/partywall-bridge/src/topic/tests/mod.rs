//! A model of two bridges and the network between them, and random histories of it.

mod cases;
mod histories;
mod messages;
mod world;
