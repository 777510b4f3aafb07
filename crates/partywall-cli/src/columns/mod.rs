//! What tables show of each kind of object. A file describes the columns of one: the heading, what stands in a cell, and
//! when a narrow terminal leaves it out; and it lists the columns of each table. `ls`, `ps`, `status` and `show` print
//! these tables; `top` draws its own, with rates.

pub(crate) mod member;
pub(crate) mod name;
pub(crate) mod object;
pub(crate) mod topic_user;
