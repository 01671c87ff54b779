//! Training data: files, rows, masks and their order, against definitions written plainly.

mod chats;
mod classes;
mod completions;
mod ends;
mod long_texts;
mod pairs;
mod plain;
mod refused;
mod rows;
mod support;
